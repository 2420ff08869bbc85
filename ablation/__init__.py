"""Comparisons of settings of train.py: plan, paired runs, statistics, verdicts and a report. One word for one thing:

An arm is a set of settings. A run trains an arm with a seed and leaves a row; runs of equal seeds are a pair. A plan
says which runs there are, an experiment carries it out in a folder, and a study is what its rows show. A comparison is
an arm against its baseline over all pairs; its verdict says in words what the tests show. judge decides whether to keep
an idea, the second of two arms. It looks after some of the pairs; each look gives a judgement, whose verdict is keep,
discard or inconclusive. A campaign is many ideas. A device is a model of hardware, a torch_device its name in PyTorch.
"""
