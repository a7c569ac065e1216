"""Checkpoints on disk: `store.Store` writes them, `loading.load` reads them, `whole` finds the ones that can be read.

A checkpoint is a folder, `step_00000100/`: safetensors files, each written by one rank, and `manifest.json`.
They are written and read through torch.distributed.checkpoint, which cuts tensors along any mesh.
Its own file format is not used: its reader unpickles `.metadata`, and its planner loads what is no tensor with
weights_only=False, either of which lets a file that somebody else gave us run code. safetensors and JSON hold numbers
and text, nothing else.

Names and shapes are the caller's: nothing here knows a model, an optimizer or a strategy.
"""
