"""GGUF files as models: which file a name means, and whether transformers can read it.

A GGUF file holds weights, sizes, tokenizer and chat template in one. transformers reads it through
the `gguf` package and dequantises it: afterwards it is a model like any other, in full precision
and size. What transformers would read wrongly without a word is refused here.
"""

import importlib.util
import os
from pathlib import Path

from utils import UserError, first_line

SIZES = {"block_count": int, "embedding_length": int, "attention.head_count": int | list}


def find(name):
    """The GGUF file that a model's name means, itself or the only one in its folder; or None.

    A folder with safetensors is read as such, whatever else it holds.
    """
    path = Path(name)
    if path.suffix.lower() == ".gguf" and not os.path.isdir(name):
        if not os.path.isfile(name):
            raise UserError(f"{name}: no such GGUF file")
        return path
    # os.path.isdir: False for a name that is too long, where Path's own raises
    if not os.path.isdir(name) or any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{name}: holds {len(files)} GGUF files ({', '.join(f.name for f in files)}"
                        "); give one of them as the model")
    return files[0] if files else None


def check_header(path):
    """`UserError` unless the header of a GGUF file is whole and says what transformers reads."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{path}: a GGUF file is read through the gguf package, which is missing: "
                        "pip install gguf")
    from transformers.integrations.gguf.reader import read_gguf_metadata

    try:
        metadata, tensors = read_gguf_metadata(str(path))
        parts = int(metadata.get("split.count", 1))
    except Exception as error:  # lengths that lead nowhere raise a dozen classes
        raise UserError(f"{path}: a broken or truncated GGUF file ({first_line(error)}); copy it "
                        "again") from None
    kind = metadata["general.architecture"]
    # transformers takes a 7B model's sizes for those that a file leaves out
    for key, kinds in SIZES.items():
        if not isinstance(metadata.get(f"{kind}.{key}"), kinds):
            raise UserError(f"{path}: an unsupported GGUF file (no {kind}.{key}); use the model's "
                            "safetensors")
    if parts > 1:
        raise UserError(f"{path}: one part of a GGUF model in {parts} files; "
                        "merge them first (llama-gguf-split --merge)")
    if metadata[f"{kind}.block_count"] > len(tensors):
        raise UserError(f"{path}: a broken GGUF file (more layers than tensors); copy it again")
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors or scaling != "none":
        raise UserError(f"{path}: scales its rotary positions, which transformers does not read "
                        "from a GGUF file; use the model's safetensors")


def unreadable(path, error):
    """The `UserError` for what transformers or gguf raise about a file with a good header."""
    why = first_line(error)
    if "not supported" in why:
        return UserError(f"{path}: an unsupported GGUF file ({why})")
    return UserError(f"{path}: a broken, truncated or unsupported GGUF file ({why}); copy it again "
                     "or use the model's safetensors")
