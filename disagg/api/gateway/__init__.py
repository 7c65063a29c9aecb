"""What the gateway's own calls send: the live view, the history, several requests together; and the
bounds of its clients' keys."""
