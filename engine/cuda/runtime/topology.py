"""The link that joins two GPUs, as the driver's management library tells it.

Whatever this process is allowed to see of them.
"""

import pynvml


def joined_by(one: str, other: str) -> str:
    """Return what joins the GPUs of these UUIDs.

    UUIDs as `torch.cuda.get_device_properties` has them: "NVLink", "PCIe", or "" where the library is absent, or does
    not know both.
    """
    try:
        pynvml.nvmlInit()
        first, second = (pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in (one, other))
        status = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return ""
    return "NVLink" if status == pynvml.NVML_P2P_STATUS_OK else "PCIe"
