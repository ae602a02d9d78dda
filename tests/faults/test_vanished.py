"""A machine vanishes with its disk: its run goes on elsewhere, from the copy in a bucket."""

import contextlib
import shutil

import faulty
import fsspec
import psutil
import pytest

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]
MOMENTS = ("in a step", "in its first checkpoint", "between epochs")


def copied(url):
    """The checkpoints that count in the copy."""
    files, root = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    with contextlib.suppress(FileNotFoundError):
        return {path.split("/")[-2] for path in files.find(f"{root}/checkpoints") if path.endswith("/manifest.json")}
    return set()


def test_two_workers_go_on_elsewhere_to_the_weights_of_an_undisturbed_run(tmp_path, bucket, undisturbed, measured):
    url = f"{bucket.url}/mine"
    for number, moment in enumerate((*MOMENTS, None)):
        run, before = tmp_path / f"machine-{number}/run", copied(url)
        with faulty.faulty(
            tmp_path / f"start-{number}", "workers", run=run, resume=bool(before), recipe=[f"--copy_to={url}"]
        ) as job:
            if moment is None:
                weights = job.finish()
                break
            job.until(lambda job=job: len(job.events("started")) == 2)
            job.reach(moment, "worker:0", before)
            job.until(lambda before=before: copied(url) - before)
            for process in [psutil.Process(job.process.pid), *job.left()]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            job.gone(limit=15)
            shutil.rmtree(run)
            assert "Resumed after step" in job.text or not before
    measured("SIGKILL of all tasks of a run with a copy, whose disk is lost: final weights", machines=len(MOMENTS) + 1)
    assert weights == undisturbed("workers")
    assert len(copied(url)) == 3, "as many as in the run directory"
