"""Where a copy is put together."""

from __future__ import annotations

import os
from pathlib import Path

from gpufleet.on_node.transfer.store import IncomingTree


def test_the_first_revision_of_a_model_makes_the_models_folder(tmp_path: Path) -> None:
    """Readable to the server's user, whatever the umask of who logs in."""
    model = tmp_path / "lab--tiny"
    umask = os.umask(0o077)
    try:
        IncomingTree(str(model / "17b23a3e"), str(model / "17b23a3e/.complete"))
    finally:
        os.umask(umask)

    assert model.stat().st_mode & 0o777 == 0o755
