// Macros that CUDA's headers expect from a package of the compiler: a plain C++ compiler needs them empty.
#pragma once
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __specialization_static
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __location__(what) __annotate__(what)
#define __annotate__(what)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define _CRTIMP
