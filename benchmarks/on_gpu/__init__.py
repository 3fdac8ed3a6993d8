"""The four parts of ``benchmarks/gpu.py``.

scale     models, lengths and limits: the real ones, and tiny ones that prove the measuring code
stage     where a step runs: a GPU, a CPU, or fake tensors on a GPU that need not be there
methods   ways to take the same training step
runner    a process per job, time budgets, findings, tables;  worker  the other end of it
correctness, capacity, timing, profiling   one part each: its jobs, what a process measures, its tables
"""
