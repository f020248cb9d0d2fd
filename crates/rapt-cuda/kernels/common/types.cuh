// Integer types, and the codes of dtypes and masks that a variant is compiled for (-DSTORAGE, -DMASK, -DMASK_DTYPE). Nothing of CUDA
// is included anywhere: NVRTC bundles no headers.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// PyTorch's export codes, as rapt_core::DType numbers them.
#define F16 6
#define F32 7
#define F64 8
#define BF16 13
// rapt_core::MaskClass.
#define NO_MASK 0
#define BOOL_MASK 1
#define ADDITIVE_MASK 2
// Whether scores are compared in natural units (softmax.cuh), as they are unless a variant says otherwise.
#ifndef NATURAL
#define NATURAL 1
#endif
// Whether q, k or v may be codes of a quantized format; AS_NUMBERS: k and v are, and become tiles of numbers (mma.cu); AS_INTEGERS: they
// are int8, and multiplied as such (int8.cu).
#ifndef CODES
#define CODES 0
#endif
#define AS_NUMBERS 2
#define AS_INTEGERS 3
// Whether sequences have lengths of their own, and whether their keys lie in pages.
#ifndef RAGGED
#define RAGGED 0
#endif
#ifndef PAGED
#define PAGED 0
#endif
// Whether rows that lie in pages are gathered 16 bytes at a time where TMA does not load them.
#ifndef GATHERS
#define GATHERS 0
#endif
// Whether sequences lie one after another: ROWS_OF_HEAD where the rows of a task are those of a head, else ROWS_OF_GROUP.
#ifndef VARLEN
#define VARLEN 0
#endif
#define ROWS_OF_HEAD 1
#define ROWS_OF_GROUP 2
// Whether weights are dropped. Where a variant says so or not, Params says which.
#ifdef DROPOUT
#define SAYS_DROPPED 1
#else
#define SAYS_DROPPED 0
#define DROPOUT 0
#endif
