"""Run files: what they may say, how they are read, and what they stand for."""

from holdfast.runs.config.load import config_from_dict as config_from_dict
from holdfast.runs.config.load import load_config as load_config
from holdfast.runs.config.load import stored_config as stored_config
from holdfast.runs.config.presets import describe_preset as describe_preset
from holdfast.runs.config.schema import RunConfig as RunConfig
