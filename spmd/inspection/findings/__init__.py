"""What costs a program more than it has to, and what to write instead.

In the order of reading:

- `rules`: all rules, in the order of a report.
- `values`: arguments that are whole, and values between them and results.
- `batch`: batches that are not split.
- `work`: products that devices compute alike.
- `recomputed`: what a compiler makes again for want of memory.
- `rematerialization`: what the partitioner warns of.
"""
