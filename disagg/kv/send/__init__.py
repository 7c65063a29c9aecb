"""The sending end: `Transfer`, and what a finished one took."""

from disagg.kv.limits import SendLimits
from disagg.kv.send.result import SentKV, Span, TransferResult
from disagg.kv.send.transfer import Transfer

__all__ = ["SendLimits", "SentKV", "Span", "Transfer", "TransferResult"]
