"""What the demo's models continue, and how."""

from __future__ import annotations

PROMPT = '''class Account:
    """Money that belongs to somebody."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError('amount must be positive')
        self.balance += amount

    def withdraw(self, amount):
'''
MAX_TOKENS = 128
STOP: tuple[str, ...] = ()
REPETITION_PENALTY = 1.25
