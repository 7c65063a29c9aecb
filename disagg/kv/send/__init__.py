"""The sending end: `Transfer`, and what a finished one took."""

from disagg.kv.limits import SendLimits
from disagg.kv.send.result import ComputeStep, LinkWait, SentKV, Span, TransferResult
from disagg.kv.send.transfer import Transfer

__all__ = ["ComputeStep", "LinkWait", "SendLimits", "SentKV", "Span", "Transfer", "TransferResult"]
