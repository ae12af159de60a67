"""gpufleet turns bare Linux GPU servers into a vLLM fleet over SSH, and changes it safely."""

import os

# pydantic reads the metadata of every installed package, for plugins: 7 ms of each start, and
# settings mean the same whatever is installed beside us.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
