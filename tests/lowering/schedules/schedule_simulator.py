"""A pipeline in time, from nothing but the order of tasks and what each of them waits for.

    start(task) = max(end of the task before it on its IPU, for each task it waits for: its end + comm if elsewhere)

Written apart from `ipujax.lowering.schedules`, as its oracle: it shares only the names of tasks.
"""

from __future__ import annotations


def waits_for(task, num_stages, all_tasks):
    """(stage, micro-batch, kind) of what `task` waits for; kinds are the letters of `letters`."""
    stage, j, kind = task
    if kind == "F":
        return [(stage - 1, j, "F")] if stage > 0 else []
    if kind == "W":
        return [(stage, j, "I")]
    after = [(stage + 1, j, "B" if (stage + 1, j, "B") in all_tasks else "I")] if stage + 1 < num_stages else []
    return [(stage, j, "F"), *after]


def letters(task):
    """A `Task` as (stage, micro-batch, one of "F", "B", "I", "W")."""
    name = task.kind.name
    return (task.stage, task.micro_batch, {"BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}.get(name, name[0]))


def simulate(lists, num_stages, cost, comm=0):
    """Start and end of each task of each IPU's list; `cost[stage][kind]` is how long one takes.

    Raises:
        ValueError: a deadlock.
    """
    ipu_of = {task: ipu for ipu, tasks in enumerate(lists) for task in tasks}
    times, clock, place = {}, [0] * len(lists), [0] * len(lists)
    while len(times) < len(ipu_of):
        before = len(times)
        for ipu, tasks in enumerate(lists):
            while place[ipu] < len(tasks):
                task = tasks[place[ipu]]
                needs = waits_for(task, num_stages, ipu_of)
                if not all(need in times for need in needs):
                    break
                arrivals = [times[need][1] + comm * (ipu_of[need] != ipu) for need in needs]
                start = max([clock[ipu], *arrivals])
                clock[ipu] = start + cost[task[0]][task[2]]
                times[task] = (start, clock[ipu])
                place[ipu] += 1
        if len(times) == before:
            raise ValueError("deadlock")
    return times


def makespan(lists, num_stages, cost, comm=0):
    return max(end for _, end in simulate(lists, num_stages, cost, comm).values())
