"""The service that does both: prompts and answers on one device, alone or beside others."""
