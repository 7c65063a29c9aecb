"""The only room that imports torch, transformers or mlx. `base` states the two interfaces."""
