"""RUNS IN A RELEASE'S OWN PYTHON: what its `vllm serve` parser says of command lines.

Reads one JSON list of arguments a line, writes one JSON object a line: `accepted`, and `error`,
the end of what the parser wrote. The parser is built and called as the `vllm` command does it,
once for all lines: importing vLLM takes half a minute.
"""

import contextlib
import io
import json
import sys


def main():
    sys.argv = ["vllm", "serve"]  # vLLM's own imports look at it
    with contextlib.redirect_stdout(sys.stderr):
        import vllm
        from vllm.entrypoints.cli.serve import ServeSubcommand

        try:
            from vllm.utils.argparse_utils import FlexibleArgumentParser
        except ImportError:  # before 0.12
            from vllm.utils import FlexibleArgumentParser
        parser = FlexibleArgumentParser(description="vLLM CLI")
        parser.add_argument("-v", "--version", action="version", version="")
        subparsers = parser.add_subparsers(required=False, dest="subparser")
        ServeSubcommand().subparser_init(subparsers)
    print(json.dumps({"vllm": vllm.__version__, "python": sys.version.split()[0]}), flush=True)
    for line in sys.stdin:
        print(json.dumps(judged(parser, json.loads(line))), flush=True)


def judged(parser, arguments):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parser.parse_args(["serve", *arguments])
    except SystemExit:  # also with status 0, after it printed its help
        return {"accepted": False, "error": said.getvalue().strip()[-500:]}
    except Exception as error:  # noqa: BLE001  # a traceback: the server does not start, either
        return {"accepted": False, "error": f"{type(error).__name__}: {error}"}
    return {"accepted": True, "error": ""}


main()
