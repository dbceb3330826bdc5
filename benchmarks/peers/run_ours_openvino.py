"""This project's engine in one process, both models by OpenVINO."""

from run_ours import main

if __name__ == "__main__":
    main("openvino")
