"""``specdec serve`` with the small application of the tests."""

import sys

from cluster.cli import main
from cluster.cli import serve as serve_command
from cluster.cli.flags import config_overrides
from cluster.config.files import load_config

if __name__ == "__main__":
    serve_command.run = lambda arguments: serve_command.serve(
        load_config(None, config_overrides(arguments)), "tests.cluster.stub_app:build"
    )
    sys.exit(main(["serve", *sys.argv[1:]]))
