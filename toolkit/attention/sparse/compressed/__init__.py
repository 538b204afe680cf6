"""Attention to blocks that stand for their tokens: DeepSeek-V4's, and Qwen4's selection by blocks.

compressed_attention.py   a window, and entries that stand for the blocks before it; all of them, or
                          those that an indexer picks
entries.py                the entries that new tokens may see
pooling.py                how the rows of a block become one
qwen_sparse_attention.py  tokens of the blocks that an indexer picks by the mean of their keys
references.py             the equations, to be read
cache.py                  the window and the entries while decoding
costs.py                  FLOPs and bytes
rows.py                   their rows in the table of mixers
"""
