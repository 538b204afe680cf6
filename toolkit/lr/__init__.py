"""Schedules."""

from toolkit.lr.forecast import Forecast, forecast_loss, published_forecast
from toolkit.lr.schedules import (
    cooldown_schedule,
    power_schedule,
    refined_schedule,
    tabulated_schedule,
    warmup_stable_decay_schedule,
)
