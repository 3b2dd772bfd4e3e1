"""What the process of every service shares: its settings' words, its signals, its HTTP server."""

from service.release import release as release
from service.run import run_service as run_service
from service.server import Server as Server
from service.server import serving as serving
from service.settings import read_settings as read_settings
