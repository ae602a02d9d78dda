"""Callbacks that watch a run while it trains: what they show, measure and write during `fit`.

`monitor` makes all of them and puts them in order; each is a callback, which asks the first one, `tracker`.

tracker       the callback that counts steps, and how fast they go
stop_signals  SIGINT, SIGTERM and SIGHUP: all processes stop after the same step
profiler      a profile of a few steps, and where the time of a step goes
meter         a step's time, and the bytes that the network brought
recorder      what an epoch came to: history.csv, the screen, TensorBoard, the launcher
checkpointer  writes checkpoints and makes `fit` go on in mid-epoch
monitor       the callbacks of a run, made and put in order
ray_report    tells Ray Train what an epoch came to
"""
