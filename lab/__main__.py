"""`python -m lab ...` is `gpufleet lab ...`."""

import sys

from gpufleet.cli.main import main

sys.argv[1:1] = ["lab"]
sys.exit(main())
