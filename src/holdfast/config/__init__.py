"""Run files: what they may say, how they are read, and what they stand for."""

from holdfast.config.load import config_from_dict as config_from_dict
from holdfast.config.load import load_config as load_config
from holdfast.config.presets import describe_preset as describe_preset
from holdfast.config.resolve import config_sha256 as config_sha256
from holdfast.config.resolve import resolved as resolved
from holdfast.config.schema import RunConfig as RunConfig
