"""RUNS IN A RELEASE'S OWN PYTHON: prints the options of SGLang's parser as one JSON object.

    python real_sglang.py > options-VERSION.json

By option: the attribute that it fills, whether it takes a value, nargs, and whether it is required.
"""

import argparse
import json
import sys

from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
options = {
    option: [action.dest, action.nargs != 0, action.nargs or None, action.required]
    for option, action in parser._option_string_actions.items()
    if option not in ("-h", "--help")
}
lines = (f"{json.dumps(name)}: {json.dumps(options[name])}" for name in sorted(options))
sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
