# SPDX-License-Identifier: Apache-2.0
"""Planning: what fits on a GPU, from runs of the program on virtual GPUs.

configuration    a program and its virtual GPU, and values for the program's arguments
virtual_run      one run in a separate process, new or forked, and its outcome
run_process      the process of a run; changes: the changes of a suggestion
fork_server      the process that runs are forked from
runs             many runs at once, stored in runs.jsonl
verdict          whether one configuration fits, and how to make it fit
table            the cells of a plan: the largest value that fits for each mode and GPU, found by few runs
draws            the probability of running out of memory with Poisson sampling
replay           a recorded run with other settings, and the process of one
python           plans of a function; call is the program that runs it
report           a plan in plain words, and its files besides its runs: plan.json, a profile
"""
