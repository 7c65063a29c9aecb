"""What the demo's models continue: a method like those before it. Models of 1.7 million parameters manage that much."""

from __future__ import annotations

from pathlib import Path
from typing import Final

PROMPT_FILE: Final = Path(__file__).with_name("prompt.txt")
PROMPT: Final = PROMPT_FILE.read_text(encoding="utf-8")
MAX_TOKENS: Final = 128
# Both models close the method. What follows would be another method, or one more class attribute.
STOP: Final = ("\n\n", "\n    __")
METHOD_TOKENS: Final = 26  # of the method, for a request without stop strings
