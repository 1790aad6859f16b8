"""Measuring the real engine, and fitting a machine profile to what was measured."""

from kvsim.calibration.run import HELD_OUT_BOUND, Calibration, calibrate, measure
from kvsim.calibration.subject import NumpySubject, Subject
from kvsim.calibration.yardstick import Yardstick

__all__ = ["HELD_OUT_BOUND", "Calibration", "NumpySubject", "Subject", "Yardstick", "calibrate", "measure"]
