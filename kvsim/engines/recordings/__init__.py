"""Recordings of engines and servers: their files, replays of them, and how decisions and times compare with ours."""
