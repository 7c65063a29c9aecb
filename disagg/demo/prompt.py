"""What the demo's models continue: a method like those before it. Models of 1.7 million parameters manage that much."""

from __future__ import annotations

from typing import Final

PROMPT: Final = """\
class Context(object):

    def is_nan(self, a):
        a = _convert_other(a, raiseit=True)
        return a.is_nan()

    def is_normal(self, a):
        a = _convert_other(a, raiseit=True)
        return a.is_normal(context=self)

    def is_qnan(self, a):
        a = _convert_other(a, raiseit=True)
        return a.is_qnan()

    def is_signed(self, a):
        a = _convert_other(a, raiseit=True)
        return a.is_signed()

    def is_snan(self, a):
        a = _convert_other(a, raiseit=True)
        return a.is_snan()

    def is_subnormal(self, a):
"""
MAX_TOKENS: Final = 128
# Both models close the method. What follows would be another method, or one more class attribute.
STOP: Final = ("\n\n", "\n    __")
