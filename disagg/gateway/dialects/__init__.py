"""The APIs that the gateway speaks. `base` says what each of them is made of."""
