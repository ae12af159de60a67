"""Run `gpufleet lab ...` as `python -m lab ...`."""

import sys

from gpufleet.cli.main import main

sys.argv[1:1] = ["lab"]
sys.exit(main())
