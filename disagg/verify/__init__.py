"""`disagg verify`: compare the hand-off with each engine alone, on one machine.

`python -m disagg.verify` loads both engines in one process (`pair`), answers one prompt with and without a hand-off,
and compares tokens and logits.
"""
