// kernels/common/params.cuh for a host compiler: what a tile is made of. Requests do not occur in the maps.

#pragma once
#include "common/types.cuh"

typedef u16 Elem;
