// Whether tiles work. For CPUs that have AVX-512 and say that they have AMX.
#pragma once

namespace amx {

bool has_tiles();

}  // namespace amx
