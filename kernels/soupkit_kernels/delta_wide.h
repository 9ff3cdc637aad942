/* Float32 arithmetic in vectors of LANES, for one instruction set; included once for each.

   In the compiler's vector types: a target attribute is nearly all that an instruction set adds.
   Weights are widened as they are read; inputs are float32. HAS_HALF: there are half_to_float and
   float_to_half. HAS_MASKS: the 512-bit forms with mask registers. */

typedef float ISA(floats) __attribute__((vector_size(4 * LANES)));
typedef uint32_t ISA(words) __attribute__((vector_size(4 * LANES)));
typedef uint16_t ISA(shorts) __attribute__((vector_size(2 * LANES)));

#define STEP LANES
#define X_BYTES 4
#define VALUE ISA(floats)
#define SUM ISA(floats)

INLINE TARGET ISA(floats) ISA(inputs)(const char *x, int64_t k) {
    ISA(floats) value;
    memcpy(&value, x + 4 * k, sizeof value);
    return value;
}

INLINE TARGET ISA(words) ISA(widen)(ISA(shorts) value) {
#ifdef HAS_MASKS
    /* gcc 12 makes five instructions of the general form. */
    return (ISA(words))_mm512_cvtepu16_epi32((__m256i)value);
#else
    return __builtin_convertvector(value, ISA(words));
#endif
}

INLINE TARGET ISA(shorts) ISA(narrow)(ISA(words) value) {
#ifdef HAS_MASKS
    return (ISA(shorts))_mm512_cvtepi32_epi16((__m512i)value);
#else
    return __builtin_convertvector(value, ISA(shorts));
#endif
}

INLINE TARGET ISA(floats) ISA(weights)(const char *row, int64_t k, int kind) {
    if (kind == F32) return ISA(inputs)(row, k);
#ifdef HAS_HALF
    if (kind == F16) return (ISA(floats))ISA(half_to_float)((const uint16_t *)row + k);
#endif
    ISA(shorts) value;
    memcpy(&value, row + 2 * k, sizeof value);
    return (ISA(floats))(ISA(widen)(value) << 16);
}

/* +-size by the bits. */
INLINE TARGET ISA(floats) ISA(signed_by)(const uint8_t *bits, int64_t k, float size) {
#ifdef HAS_MASKS
    uint16_t mask;
    memcpy(&mask, bits + k / 8, 2);
    return (ISA(floats))_mm512_mask_blend_ps(mask, _mm512_set1_ps(-size), _mm512_set1_ps(size));
#else
    ISA(floats) value;
    memcpy(&value, sign_table[bits[k / 8]], sizeof value);
    return value * size;
#endif
}

INLINE TARGET ISA(floats) ISA(signs)(const uint8_t *bits, int64_t k) {
    return ISA(signed_by)(bits, k, 1.0f);
}

INLINE TARGET ISA(floats) ISA(multiply_add)(ISA(floats) a, ISA(floats) b, ISA(floats) sum) {
    return a * b + sum;
}

#include "delta_rows.h"

/* Writes LANES values in the weight's dtype, rounded to nearest even. */
INLINE TARGET void ISA(store)(char *out, int64_t k, int kind, ISA(floats) value) {
    if (kind == F32) {
        memcpy(out + 4 * k, &value, sizeof value);
        return;
    }
#ifdef HAS_HALF
    if (kind == F16) {
        ISA(float_to_half)((uint16_t *)out + k, value);
        return;
    }
#endif
    const ISA(words) word = (ISA(words))value, even = (word >> 16) & 1;
    const ISA(words) is_nan = (ISA(words))((word & 0x7fffffffu) > 0x7f800000u);
    const ISA(words) rounded = ((word + 0x7fffu + even) & ~is_nan) | (is_nan & 0x7fc00000u);
    const ISA(shorts) top = ISA(narrow)(rounded >> 16);
    memcpy(out + 2 * k, &top, sizeof top);
}

INLINE TARGET void ISA(effective_step)(
    const struct parts *parts, int64_t k, int kind, int planes, int is_plain, char *out
) {
    ISA(floats) delta = {0};
    for (int p = 0; p < planes; p++) {
        ISA(floats) term = ISA(signed_by)(parts->bits[p], k, parts->scale[p]);
        if (!is_plain && parts->column[p])
            term *= ISA(inputs)((const char *)parts->column[p], k);
        delta = p ? delta + term : term;
    }
    ISA(store)(out, k, kind, ISA(weights)(parts->weight, k, kind) + delta);
}

/* is_plain: no column scales. */
INLINE TARGET void ISA(effective)(
    const struct parts *given, int kind, int planes, int is_plain, char *out
) {
    const int64_t left = given->width % LANES, k = given->width - left;
    for (int64_t at = 0; at < k; at += LANES)
        ISA(effective_step)(given, at, kind, planes, is_plain, out);
    if (!left) return;
    struct parts parts = *given;
    char weight[MAX_BYTES] = {0}, rounded[MAX_BYTES];
    uint8_t bits[MAX_PLANES][4] = {{0}};
    float column[MAX_PLANES][LANES] = {{0}};
    const int64_t bytes = kind == F32 ? 4 : 2;
    memcpy(weight, parts.weight + k * bytes, left * bytes);
    parts.weight = weight;
    for (int p = 0; p < planes; p++) {
        memcpy(bits[p], parts.bits[p] + k / 8, (left + 7) / 8);
        parts.bits[p] = bits[p];
        if (is_plain || !parts.column[p]) continue;
        memcpy(column[p], parts.column[p] + k, left * 4);
        parts.column[p] = column[p];
    }
    ISA(effective_step)(&parts, 0, kind, planes, is_plain, rounded);
    memcpy(out + k * bytes, rounded, left * bytes);
}

#define EFFECTIVE(kind) \
    static TARGET void ISA(effective_##kind)(const struct parts *parts, char *out) { \
        const int is_plain = !parts->column[0]; \
        if (!is_plain) ISA(effective)(parts, kind, parts->planes, 0, out); \
        else if (parts->planes == 1) ISA(effective)(parts, kind, 1, 1, out); \
        else ISA(effective)(parts, kind, parts->planes, 1, out); \
    }
/* As many pairs as registers hold two sums of each. */
#if LANES == 16
#define NUM_ROWS {4, 4, 3}
#define SIZES(kind, mode) ROWS(kind, mode, 0, 4) ROWS(kind, mode, 1, 4) ROWS(kind, mode, 2, 3)
#else
#define NUM_ROWS {4, 2, 1}
#define SIZES(kind, mode) ROWS(kind, mode, 0, 4) ROWS(kind, mode, 1, 2) ROWS(kind, mode, 2, 1)
#endif

SIZES(F32, BASE)
SIZES(F32, SHARED)
SIZES(F32, EACH)
SIZES(F32, SHARED_SIGNS)
SIZES(F32, SIGNS)
SIZES(BF16, BASE)
SIZES(BF16, SHARED)
SIZES(BF16, EACH)
EFFECTIVE(F32)
EFFECTIVE(BF16)
#ifdef HAS_HALF
SIZES(F16, BASE)
SIZES(F16, SHARED)
SIZES(F16, EACH)
EFFECTIVE(F16)
#endif
static const struct isa ISA(isa) = {
    .rows = {
        [F32] = {
            TABLE(F32, BASE), TABLE(F32, SHARED), TABLE(F32, EACH),
            TABLE(F32, SHARED_SIGNS), TABLE(F32, SIGNS),
        },
        [BF16] = {
            TABLE(BF16, BASE), TABLE(BF16, SHARED), TABLE(BF16, EACH),
            TABLE(F32, SHARED_SIGNS), TABLE(F32, SIGNS),
        },
#ifdef HAS_HALF
        [F16] = {
            TABLE(F16, BASE), TABLE(F16, SHARED), TABLE(F16, EACH),
            TABLE(F32, SHARED_SIGNS), TABLE(F32, SIGNS),
        },
#endif
    },
    .num_rows = NUM_ROWS,
    .effective = {
        [F32] = ISA(effective_F32),
        [BF16] = ISA(effective_BF16),
#ifdef HAS_HALF
        [F16] = ISA(effective_F16),
#endif
    },
};

#undef NUM_ROWS
#undef SIZES
#undef EFFECTIVE
#undef SUM
#undef VALUE
#undef X_BYTES
#undef STEP
