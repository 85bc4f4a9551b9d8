"""Convert checkpoints to f32 GGUF files with llama.cpp's converter, without their tokenizers.

python tests/interop/llama_convert.py LLAMA_CPP FOLDER...     # writes FOLDER/model.gguf, or FOLDER/refused.txt

LLAMA_CPP has ``convert_hf_to_gguf.py``. It knows tokenizers by their hash and refuses others; numbers need none.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

CONVERTER, *FOLDERS = sys.argv[1:]
sys.path.insert(0, CONVERTER)

import conversion  # noqa: E402
import convert_hf_to_gguf  # noqa: E402


def without_vocabulary(known: type) -> type:
    """A converter of the same model that writes how many tokens there are, and none of them."""

    def set_vocab(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    return type(known.__name__, (known,), {"set_vocab": set_vocab, "model_arch": known.model_arch})


if __name__ == "__main__":
    find = conversion.get_model_class
    convert_hf_to_gguf.get_model_class = lambda *args, **kwargs: without_vocabulary(find(*args, **kwargs))
    for folder in map(Path, FOLDERS):
        sys.argv = ["convert", str(folder), "--outtype", "f32", "--outfile", str(folder / "model.gguf")]
        if json.loads((folder / "config.json").read_text())["model_type"].startswith(("qwen3_5", "qwen3_next")):
            sys.argv.append("--no-mtp")  # else it looks for a module for multi-token prediction
        try:
            convert_hf_to_gguf.main()
        except (Exception, SystemExit):
            (folder / "refused.txt").write_text(traceback.format_exc())
