"""Clusters for hypothesis: any that can be, with gaps where they may be, and of every job."""

from hypothesis import strategies as st

from toolkit.cluster import Cluster

_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}(\.[a-z]{1,5})?", fullmatch=True).filter(lambda n: n != "localhost")


@st.composite
def clusters(draw):
    shape = draw(
        st.sampled_from(
            [("worker",), ("chief",), ("chief", "worker"), ("chief", "worker", "ps"), ("worker", "evaluator")]
        )
    )
    jobs, port = {}, 1
    for job in shape:
        most = 1 if job in ("chief", "evaluator") else 5
        indices = draw(st.sets(st.integers(0, 20), min_size=1, max_size=most))
        if job == "worker" and "ps" not in shape:  # Those that train together are numbered without gaps.
            indices = range(len(indices))
        jobs[job] = {}
        for index in indices:
            jobs[job][index] = f"{draw(_NAMES)}:{port}"
            port += 1
    return Cluster(jobs)
