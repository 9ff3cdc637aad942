/* The instruction sets, from the most general to the fastest: a section each, compiled whatever the
   machine that compiles, and the choice among them as the library starts.
   Included once, by delta_linear.c; ../README.md says how to add one. */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define ISA(name) JOIN(name, ISA_NAME)

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
SIZES(BF16, BASE)
SIZES(BF16, SHARED)
SIZES(BF16, EACH)
SIZES(BF16, SHARED_SIGNS)
SIZES(BF16, SIGNS)
static const struct isa isa_avx512_bf16 = {
    .rows[BF16] = {
        TABLE(BF16, BASE), TABLE(BF16, SHARED), TABLE(BF16, EACH),
        TABLE(BF16, SHARED_SIGNS), TABLE(BF16, SIGNS),
    },
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

/* Numbered as native.py names them; those of another architecture are absent. */
static const struct isa *const isas[] = {
    &isa_portable,
#if defined(__x86_64__)
    &isa_avx2,
    &isa_avx512,
    &isa_avx512_bf16,
#endif
};

/* Called once, first. The best instruction set that this machine has, as an index of `isas`. */
int soupkit_start(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int bit = 0; bit < 8; bit++) sign_table[byte][bit] = byte >> bit & 1 ? 1 : -1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
        && __builtin_cpu_supports("f16c");
    if (!has_avx2) return 0;
    const int has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!has_avx512) return 1;
    return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#else
    return 0;
#endif
}
