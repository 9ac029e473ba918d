"""The tokenizer of the tutorials: a token for each byte."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tutorials"))
try:
    from byte_tokenizer import byte_tokenizer as byte_tokenizer
finally:
    sys.path.pop(0)
