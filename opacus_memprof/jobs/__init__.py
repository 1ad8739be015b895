# SPDX-License-Identifier: Apache-2.0
"""Jobs: many runs side by side, each in a separate process.

pool        worker threads that share devices; jobs that have not ended; child processes that can be killed together
progress    a line for each run that has ended, and a bar with the time left
executors   executors by name, also for the jobs of a cluster; a call whose worker has died is run again
"""
