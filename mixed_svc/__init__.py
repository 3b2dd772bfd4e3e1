"""The mixed service, which computes prompts and answers on one device, alone or with other workers."""
