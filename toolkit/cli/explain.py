"""A cluster in words and a table."""

from collections.abc import Iterator

from toolkit.cluster import Cluster, Task

__all__ = ["show"]

# More rows than this, and a job's middle is left out.
_ROWS = 40


def show(cluster: Cluster, task: Task | None, *, source: str) -> None:
    """Prints who takes part and who does what.

    Args:
        cluster: All tasks.
        task: The one that is this process; None where nothing says so.
        source: Where the cluster comes from, in words.
    """
    import rich
    from rich.table import Table

    console = rich.get_console()
    table = Table(title=None, box=None, pad_edge=False, header_style="bold")
    table.add_column("task", no_wrap=True)
    table.add_column("address", overflow="fold")
    table.add_column("what it does", overflow="fold")
    for row in _rows(cluster, task):
        table.add_row(*row)
    count = len(cluster.tasks)
    console.print(f"{source} describes {count:,} task{'s' * (count > 1)}.\n", markup=False, highlight=False)
    console.print(table, markup=False, highlight=False)
    for line in ["", *_words(cluster, task)]:
        console.print(line, markup=False, highlight=False)


def _rows(cluster: Cluster, own: Task | None) -> Iterator[tuple[str, str, str]]:
    for job, _ in cluster.jobs:
        tasks = [task for task in cluster.tasks if task.job == job]
        few = len(cluster.tasks) <= _ROWS or len(tasks) <= 4
        kept = tasks if few else [*tasks[:2], *([own] if own in tasks[2:-1] else []), tasks[-1]]
        for i, task in enumerate(kept):
            if i and task.index > kept[i - 1].index + 1 and not few:
                yield "...", "", ""
            mark = "  <- this process" if task == own else ""
            yield str(task), cluster.address(task), _duty(cluster, task) + mark


def _duty(cluster: Cluster, task: Task) -> str:
    asynchronous = not cluster.synchronous
    if task.job == "ps":
        return "holds a share of the variables"
    if task.job == "evaluator":
        return "evaluates checkpoints"
    if asynchronous:
        return "coordinates, writes checkpoints" if task.job == "chief" else "trains at its own pace"
    return "trains, writes checkpoints" if task == cluster.chief else "trains"


def _words(cluster: Cluster, own: Task | None) -> Iterator[str]:
    together = len(cluster.synchronous)
    yield f"The chief is {cluster.chief}, at {cluster.address(cluster.chief)}."
    if not together:
        counts = {job: len(entries) for job, entries in cluster.jobs}
        yield "No replicas are in sync: no worker waits for another."
        yield f"Workers: {counts['worker']:,}. Parameter servers, which hold the variables: {counts['ps']:,}."
    elif together == 1:
        yield "One task trains: as many replicas are in sync as it has devices."
    else:
        yield f"Replicas in sync: {together:,} with one device each, {2 * together:,} with two."
    if own is None:
        yield "It names no task: `toolkit tf-config generate` prints each process its own."
    elif own in cluster:
        yield f"This process is {own}."
    else:
        yield f"This process is {own}, which evaluates this cluster from outside."
