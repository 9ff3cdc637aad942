/* The multi-variant linear on a CPU: y[t] = x[t] (W + sum_p diag(scale_v[p]) S_v[p])^T, v = index[t].

   Two entry points, called from native.py through ctypes:
     soupkit_decode       fused: W and the bits are read once for a few tokens of any variants;
     soupkit_reconstruct  rows of the effective weight of one variant, for a matrix product.
   Sums are float32. What a row of y holds does not depend on the other tokens, on the number of
   threads or on how rows are split: each (row, token) pair has its own accumulators, which run over
   K in one order. Bits are LSB-first along K (bitpack.py); bits beyond K are never used.

   An instruction set is one section at the end of this file; README.md says how to add one. */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum kind { F32, BF16, F16, NUM_KINDS };
enum mode {
    SHARED, /* the base, and one variant for all tokens */
    EACH,   /* the base, and a variant for each token */
    SIGNS,  /* a variant for each token, without the base: planes after the first */
    NUM_MODES
};
/* A pass takes 1 << size tokens. GROUP_ROWS is a multiple of the rows that any pass takes. */
enum { NUM_SIZES = 3, MAX_TOKENS = 4, MAX_PAIRS = 12, GROUP_ROWS = 12 };
enum { MAX_ROWS = 4, MAX_BYTES = 64, MAX_PLANES = 8 };

typedef float quad __attribute__((vector_size(16)));

/* As native.py fills it: 8 bytes a field; strides of bits in bytes, of scales in floats. */
struct variant {
    const uint8_t *bits;
    int64_t bits_plane;
    const float *scale;
    int64_t scale_plane, scale_row;
    int64_t planes;
};

/* A few rows times a few tokens. Strides are in bytes and go from row to row, of x from token to
   token. Pairs are numbered row * tokens + token. */
struct block {
    const char *weight, *x;
    const uint8_t *bits[MAX_TOKENS]; /* SHARED: only the first is read */
    int64_t weight_stride, x_stride, bits_stride;
    int64_t width; /* K */
    float *base, *sign;
};

/* The inputs beyond the last whole step, copied and filled up with zeros. */
struct rest {
    char weight[MAX_ROWS][MAX_BYTES], x[MAX_TOKENS][MAX_BYTES];
    uint8_t bits[MAX_TOKENS][MAX_ROWS][4];
};

/* Points the block at what is left beyond its last whole step, as one whole step.
   weight_bytes: of one weight; 0 where none is read. */
static __attribute__((noinline)) int take_rest(
    struct block *block, struct rest *rest, int step, int x_bytes, int weight_bytes, int num_tokens,
    int num_rows
) {
    const int64_t left = block->width % step, k = block->width - left;
    memset(rest, 0, sizeof *rest);
    for (int r = 0; r < num_rows; r++)
        memcpy(
            rest->weight[r], block->weight + r * block->weight_stride + k * weight_bytes,
            left * weight_bytes
        );
    for (int m = 0; m < num_tokens; m++) {
        memcpy(rest->x[m], block->x + m * block->x_stride + k * x_bytes, left * x_bytes);
        for (int r = 0; r < num_rows; r++)
            memcpy(
                rest->bits[m][r], block->bits[m] + r * block->bits_stride + k / 8, (left + 7) / 8
            );
        block->bits[m] = rest->bits[m][0];
    }
    block->weight = rest->weight[0];
    block->x = rest->x[0];
    block->weight_stride = block->x_stride = MAX_BYTES;
    block->bits_stride = sizeof rest->bits[0][0];
    block->width = step;
    return 1;
}

typedef void (*rows_fn)(struct block *);
typedef void (*effective_fn)(
    const char *weight, const struct variant *, int64_t row, int64_t bits_stride, int64_t width,
    char *out
);

struct isa {
    rows_fn rows[NUM_KINDS][NUM_MODES][NUM_SIZES];
    int num_rows[NUM_SIZES]; /* that such a pass takes */
    effective_fn effective[NUM_KINDS];
};

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define ISA(name) JOIN(name, ISA_NAME)

/* -- instruction sets, from the most general to the fastest -- */

#define ISA_NAME portable
#define TARGET
#define LANES 8
#include "delta_wide.h"
#undef LANES
#undef TARGET
#undef ISA_NAME

#if defined(__x86_64__)

#define ISA_NAME avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES 8
INLINE TARGET __m256 half_to_float_avx2(const uint16_t *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
INLINE TARGET void float_to_half_avx2(uint16_t *to, __m256 value) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
#define HAS_HALF
#include "delta_wide.h"
#undef LANES
#undef TARGET
#undef ISA_NAME

#define ISA_NAME avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define LANES 16
INLINE TARGET __m512 half_to_float_avx512(const uint16_t *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
INLINE TARGET void float_to_half_avx512(uint16_t *to, __m512 value) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
#define HAS_MASKS
#include "delta_wide.h"
#undef HAS_MASKS
#undef HAS_HALF
#undef LANES
#undef TARGET

/* Pairs of bfloat16 products summed into float32. Inputs stay bfloat16, subnormals count as 0. */
#undef ISA_NAME
#define ISA_NAME avx512_bf16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define STEP 32
#define X_BYTES 2
#define VALUE __m512i
#define SUM __m512
INLINE TARGET __m512i inputs_avx512_bf16(const char *x, int64_t k) {
    return _mm512_loadu_si512(x + 2 * k);
}
INLINE TARGET __m512i weights_avx512_bf16(const char *row, int64_t k, int kind) {
    (void)kind;
    return _mm512_loadu_si512(row + 2 * k);
}
INLINE TARGET __m512i signs_avx512_bf16(const uint8_t *bits, int64_t k) {
    uint32_t word;
    memcpy(&word, bits + k / 8, 4);
    return _mm512_mask_blend_epi16(
        word, _mm512_set1_epi16((short)0xBF80), _mm512_set1_epi16(0x3F80)
    );
}
INLINE TARGET __m512 multiply_add_avx512_bf16(__m512i a, __m512i b, __m512 sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
#include "delta_rows.h"
#define NUM_ROWS {4, 4, 3}
#define SIZES(kind, mode) ROWS(kind, mode, 0, 4) ROWS(kind, mode, 1, 4) ROWS(kind, mode, 2, 3)
SIZES(BF16, SHARED)
SIZES(BF16, EACH)
SIZES(BF16, SIGNS)
static const struct isa isa_avx512_bf16 = {
    .rows[BF16] = {TABLE(BF16, SHARED), TABLE(BF16, EACH), TABLE(BF16, SIGNS)},
    .num_rows = NUM_ROWS,
};
#undef SIZES
#undef NUM_ROWS
#undef SUM
#undef VALUE
#undef X_BYTES
#undef STEP
#undef TARGET
#undef ISA_NAME

#endif /* __x86_64__ */

/* Numbered as native.py names them; those of another architecture are NULL. */
static const struct isa *const isas[] = {
    &isa_portable,
#if defined(__x86_64__)
    &isa_avx2,
    &isa_avx512,
    &isa_avx512_bf16,
#endif
};

/* The best that this machine runs, as an index of `isas`. */
int soupkit_best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
        && __builtin_cpu_supports("f16c");
    if (!wide) return 0;
    int masks = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!masks) return 1;
    return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#else
    return 0;
#endif
}

/* -- work, shared by threads that take runs of rows until none is left -- */

/* GOMP_parallel of the OpenMP runtime that torch has loaded: its pool, no second runtime. */
typedef void (*parallel_fn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

struct work {
    const struct isa *isa;
    int64_t kind, num_tokens, num_rows, width;
    const char *x;
    int64_t x_stride;
    const char *weight;
    int64_t weight_stride, bits_stride;
    const struct variant *variants;
    const int64_t *index;
    float *y; /* [num_tokens, num_rows] */
    int64_t run_rows, next_row;
};

/* Tokens first .. first + (1 << size), rows begin .. begin + num_rows of the pass, of which the
   first `rows` count. */
static void decode_block(const struct work *work, int64_t first, int size, int64_t begin, int rows) {
    const int tokens = 1 << size, step = work->isa->num_rows[size];
    const struct variant *variant[MAX_TOKENS];
    float base[MAX_PAIRS], sign[MAX_PAIRS];
    int64_t planes = 1;
    int shared = 1;
    for (int m = 0; m < tokens; m++) {
        const int64_t v = work->index[first + m];
        variant[m] = v < 0 ? NULL : work->variants + v;
        shared &= v == work->index[first];
        if (v >= 0 && variant[m]->planes > planes) planes = variant[m]->planes;
    }
    for (int64_t p = 0; p < planes; p++) {
        const int is_whole = rows == step;
        struct block block = {
            .weight = work->weight + begin * work->weight_stride,
            .x = work->x + first * work->x_stride, .x_stride = work->x_stride,
            /* Too few rows are left: the first one again in place of those that do not exist. */
            .weight_stride = is_whole ? work->weight_stride : 0,
            .bits_stride = is_whole ? work->bits_stride : 0,
            .width = work->width, .base = base, .sign = sign,
        };
        for (int m = 0; m < tokens; m++) {
            /* A token without this plane runs over others' bits; its sums are not read. */
            const struct variant *v = variant[m] ? variant[m] : work->variants;
            block.bits[m] =
                v->bits + (p < v->planes ? p : 0) * v->bits_plane + begin * work->bits_stride;
        }
        work->isa->rows[work->kind][p ? SIGNS : shared ? SHARED : EACH][size](&block);
        for (int m = 0; m < tokens; m++) {
            const struct variant *v = variant[m];
            float *y = work->y + (first + m) * work->num_rows + begin;
            for (int r = 0; r < rows; r++) {
                const float add = v && p < v->planes
                    ? v->scale[p * v->scale_plane + (begin + r) * v->scale_row] * sign[r * tokens + m]
                    : 0;
                y[r] = (p ? y[r] : base[r * tokens + m]) + add;
            }
        }
    }
}

static void decode_rows(const struct work *work, int64_t begin, int64_t end) {
    /* A group of rows stays in a near cache while all tokens pass over it. */
    for (int64_t group = begin; group < end; group += GROUP_ROWS) {
        const int64_t stop = end - group < GROUP_ROWS ? end : group + GROUP_ROWS;
        int size = NUM_SIZES - 1;
        for (int64_t token = 0; token < work->num_tokens; token += 1 << size) {
            while (1 << size > work->num_tokens - token) size--;
            const int step = work->isa->num_rows[size];
            int64_t row = group;
            for (; row + step <= stop; row += step) decode_block(work, token, size, row, step);
            for (; row < stop; row++) decode_block(work, token, size, row, 1);
        }
    }
}

static void decode_body(void *data) {
    struct work *work = data;
    for (;;) {
        const int64_t row = __atomic_fetch_add(&work->next_row, work->run_rows, __ATOMIC_RELAXED);
        if (row >= work->num_rows) return;
        const int64_t left = work->num_rows - row;
        decode_rows(work, row, row + (left < work->run_rows ? left : work->run_rows));
    }
}

static void effective_body(void *data) {
    struct work *work = data;
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&work->next_row, work->run_rows, __ATOMIC_RELAXED);
        for (int64_t row = begin; row < begin + work->run_rows; row++) {
            if (row >= work->num_rows) return;
            work->isa->effective[work->kind](
                work->weight + row * work->weight_stride, work->variants, row, work->bits_stride,
                work->width,
                (char *)work->y + row * work->width * (work->kind == F32 ? 4 : 2)
            );
        }
    }
}

static void run(void (*body)(void *), struct work *work, parallel_fn parallel, int64_t threads) {
    /* Runs of whole groups, several a thread, so that a slow thread does not hold up the rest. */
    int64_t rows = work->num_rows / (4 * threads) / GROUP_ROWS * GROUP_ROWS;
    work->run_rows = rows < GROUP_ROWS ? GROUP_ROWS : rows;
    work->next_row = 0;
    if (parallel && threads > 1) parallel(body, work, (unsigned)threads, 0);
    else body(work);
}

/* Strides in bytes; x is float32, for avx512_bf16 it is bfloat16, its rows contiguous. */
void soupkit_decode(
    int64_t isa, int64_t kind, int64_t threads, parallel_fn parallel, int64_t num_tokens,
    int64_t num_rows, int64_t width, const void *x, int64_t x_stride, const void *weight,
    int64_t weight_stride, int64_t bits_stride, const struct variant *variants,
    const int64_t *index, float *y
) {
    struct work work = {
        .isa = isas[isa], .kind = kind, .num_tokens = num_tokens, .num_rows = num_rows,
        .width = width, .x = x, .x_stride = x_stride, .weight = weight,
        .weight_stride = weight_stride, .bits_stride = bits_stride, .variants = variants, .index = index, .y = y,
    };
    run(decode_body, &work, parallel, threads);
}

/* `out` [num_rows, width], contiguous, in the weight's dtype; rounded once to nearest even. */
void soupkit_reconstruct(
    int64_t isa, int64_t kind, int64_t threads, parallel_fn parallel, int64_t num_rows,
    int64_t width, const void *weight, int64_t weight_stride, int64_t bits_stride,
    const struct variant *variant, void *out
) {
    struct work work = {
        .isa = isas[isa], .kind = kind, .num_rows = num_rows, .width = width, .weight = weight,
        .weight_stride = weight_stride, .bits_stride = bits_stride, .variants = variant, .y = out,
    };
    run(effective_body, &work, parallel, threads);
}
