"""Steps on CPUs by OpenVINO, of models whose layers all attend to all positions."""
