"""What a rank sends of its gradients, and how the ranks' shares become their mean again.

One file a compressor. Nothing here knows a strategy: a compressor gets buckets, flat tensors of gradients with the
parameters that lie in them, and answers with the futures of their means.
"""
