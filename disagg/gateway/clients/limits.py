"""How much a key may use: requests and tokens per minute, and answers at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from disagg.api.requests import Share
from disagg.errors import DisaggError, Overloaded, RequestError
from disagg.gateway.clients.keys import Key
from disagg.shares import Places

MINUTE_S = 60.0


class Bucket:
    """So many per minute, of which a minute's share may be used at once. Times are time.monotonic()."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._updated = now

    def wait_s(self, count: int, now: float) -> float:
        """Seconds until so many more may be used; 0 if they may be used now. More than a minute's share never may: for
        them it is enough that the bucket is full."""
        self._fill(now)
        return max(0.0, (min(count, self._per_minute) - self._level) * MINUTE_S / self._per_minute)

    def take(self, count: int, now: float) -> None:
        """Use so many, also more than there are: the next one then waits longer."""
        self._fill(now)
        self._level -= count

    def limit(self, per_minute: int, now: float) -> None:
        """So many per minute from now on. What has been used stays used."""
        self._fill(now)
        self._per_minute = per_minute
        self._level = min(self._level, float(per_minute))

    def _fill(self, now: float) -> None:
        self._level = min(float(self._per_minute), self._level + (now - self._updated) * self._per_minute / MINUTE_S)
        self._updated = now


class KeyLimits:
    """The buckets of all keys that have limits."""

    def __init__(self) -> None:
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}

    def admit(self, key: Key, answers: int, now: float) -> None:
        """Count a request: as many as the answers that it asks for, each of which the hosts compute. Raises Overloaded,
        which says when to try again, if the key has used up its share."""
        requests = _bucket(self._requests, key.id, key.requests_per_minute, now)
        tokens = _bucket(self._tokens, key.id, key.tokens_per_minute, now)
        for bucket, count, limit in (
            (requests, answers, f"{key.requests_per_minute} requests"),
            (tokens, 1, f"{key.tokens_per_minute} tokens"),
        ):
            if bucket is not None and (wait_s := bucket.wait_s(count, now)) > 0:
                error = Overloaded(f"the key {key.name} is limited to {limit} per minute")
                error.retry_after_s = math.ceil(wait_s)
                raise error
        if requests is not None:
            requests.take(answers, now)

    def spend(self, key: Key, tokens: int, now: float) -> None:
        """Count tokens that a request has used: it is not known before how many there will be."""
        bucket = _bucket(self._tokens, key.id, key.tokens_per_minute, now)
        if bucket is not None:
            bucket.take(tokens, now)


def _bucket(buckets: dict[str, Bucket], key_id: str, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    bucket = buckets.setdefault(key_id, Bucket(per_minute, now))
    bucket.limit(per_minute, now)
    return bucket


class AnswerPlaces:
    """The answers that the gateway computes at a time, at most `limit`: more would only wait for the hosts. Keys have
    fair shares of them, and may have bounds of their own."""

    def __init__(self, limit: int) -> None:
        self._places = Places(limit)

    def require(self, key: Key | None, answers: int) -> None:
        """Raises Overloaded if there are no places for so many answers of this key now, RequestError if there never
        are."""
        most = key.parallel if key is not None else None
        if key is not None and most is not None:
            if answers > most:
                raise RequestError(
                    f"n: {answers} answers, and the key {key.name} may have {most} at a time", "ask for fewer together"
                )
            if self._places.held(key.id) + answers > most:
                raise Overloaded(f"the key {key.name} may have {most} answers at a time", "wait for one of them")
        if not self._places.available(share_of(key), answers, time.monotonic()):
            limit = self._places.limit
            raise Overloaded(f"the gateway computes at most {limit} answers at a time", "try again in a moment")

    def take(
        self,
        key: Key | None,
        answers: int,
        waiting: Callable[[], bool] = lambda: False,
        give_up: Callable[[DisaggError], None] = lambda _: None,
    ) -> Callable[[], None]:
        """Take so many places, for which `require` has just found room; the function gives them back. waiting: whether
        none of these answers has begun, so that the places may be yielded to another key; give_up: is called then."""
        yielded = Overloaded("the gateway gave the place of this request to a key that has fewer", "try again later")
        place = self._places.take(
            share_of(key), answers, time.monotonic(), waiting=waiting, give_up=lambda: give_up(yielded)
        )
        assert place is not None, "`require` has found room"
        return lambda: self._places.give_back(place, time.monotonic())


def share_of(key: Key | None) -> Share:
    """Whose share the requests of this key count for."""
    return Share() if key is None else Share(key.id, key.weight)
