"""`disagg verify`: the hand-off against each engine alone, on one machine.

Run as `python -m disagg.verify MODEL`: it loads both engines, hands KV over in this process (`pair`), and compares
tokens and logits.
"""
