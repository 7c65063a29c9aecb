"""The machines: what runs where, starting and stopping it, and how it fares. Servers are processes, never imported."""
