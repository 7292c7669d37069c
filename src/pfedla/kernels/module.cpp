// Convolutions, alone and with pooling and ReLU in one, and batch norm with these; and whole networks of them
// (`network.inc`). `loops.inc`, `products.inc` and `winograd.inc` hold the loops, compiled for two instruction sets of
// x86-64; the best that the processor has is chosen when the module is loaded. Elsewhere `levels()` is empty.
//
// Functions take addresses and sizes and trust them: `pfedla.blocks` and `pfedla.chain` check what is passed. Nothing
// is allocated for the caller, and the interpreter's lock is given up meanwhile.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

namespace {

constexpr long RUN = 64;    // pixels that are summed up in single precision
constexpr int BLOCK = 16;   // channels that lie side by side in packed weights
constexpr int POINTS = 64;  // of a tile, in `winograd.inc`

// Values that begin with a line of the cache: vectors that straddle two lines are read and written at half the speed.
template <typename T>
struct OnLines {
    static constexpr std::align_val_t line{64};
    using value_type = T;
    T *allocate(size_t n) { return static_cast<T *>(::operator new(n * sizeof(T), line)); }
    void deallocate(T *place, size_t) { ::operator delete(place, line); }
    bool operator==(const OnLines &) const { return true; }
    bool operator!=(const OnLines &) const { return false; }
};

using Floats = std::vector<float, OnLines<float>>;

struct Shape {
    long n, h, w, c;
};

struct Conv {  // of images (n, h, w, c) with kernels (out, c, kh, kw), or (out, kh, kw, c), without padding
    long n, h, w, c, out, kh, kw;
    bool last = false;  // the kernels' channels come last
    long rows() const { return h - kh + 1; }
    long columns() const { return w - kw + 1; }
    long weights() const { return out * c * kh * kw; }
    long at_points() const { return POINTS * out * c; }
    long place(long o, long channel, long tap) const {  // of a weight
        return o * c * kh * kw + (last ? tap * c + channel : channel * kh * kw + tap);
    }
    long image() const { return h * w * c; }  // values of one; of what is made of it; of that, pooled
    long made() const { return rows() * columns() * out; }
    long pooled() const { return (rows() / 2) * (columns() / 2) * out; }
    bool by_tiles() const { return kh == 5 && kw == 5 && c > 1 && rows() >= 4 && columns() >= 4; }  // winograd.inc
};

struct Loops {  // one instruction set's
    const char *name;
    void (*moments)(const float *, long, long, double *, double *);
    void (*norm_pool)(const float *, Shape, const float *, const float *, float *, float *);
    void (*passed)(const float *, const float *, const float *, long, long, double *, double *);
    void (*spread)(const float *, Shape, const float *, const float *, const float *, const float *, const float *,
                   const float *, float *);
    void (*pool)(const float *, long, long, long, float *, int *);
    void (*unpool)(const int *, const float *, long, long, long, float *);
    void (*conv)(const float *, Conv, const float *, const float *, float *);
    void (*conv_weights)(const float *, Conv, const float *, float *, float *);
    void (*conv_input)(Conv, const float *, const float *, float *);
    void (*linear)(const float *, long, long, const float *, const float *, long, bool, float *);
    void (*linear_back)(const float *, long, long, const float *, const float *, long, float *, float *, float *);
    void (*kernels_at_points)(const float *, long, long, float *);
    void (*kernels_back)(const float *, long, long, float *);
    void (*conv5)(const float *, Conv, const float *, const float *, float *);
    void (*conv5_back)(const float *, Conv, const float *, const float *, float *, float *, float *);
};

#define LOOPS(name)                                                                                                   \
    {#name,  moments,     norm_pool,         passed,       spread, pool,      unpool, conv, conv_weights, conv_input, \
     linear, linear_back, kernels_at_points, kernels_back, conv5,  conv5_back}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
namespace avx2 {
constexpr int LANES = 8;
#include "loops.inc"
#include "products.inc"
#include "winograd.inc"
constexpr Loops all = LOOPS(avx2);
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#ifdef EMULATE_AVX512  // by two vectors for one, to try these loops where there is no such processor
#pragma GCC target("avx2,fma,bmi2")
#else
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi2,prefer-vector-width=512")
#endif
namespace avx512 {
constexpr int LANES = 16;
#include "loops.inc"
#include "products.inc"
#include "winograd.inc"
constexpr Loops all = LOOPS(avx512);
}  // namespace avx512
#pragma GCC pop_options

std::vector<const Loops *> supported() {  // the best first
    std::vector<const Loops *> found;
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")))
        return found;
#ifndef EMULATE_AVX512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#endif
        found.push_back(&avx512::all);
    found.push_back(&avx2::all);
    return found;
}
#else
std::vector<const Loops *> supported() { return {}; }
#endif

const std::vector<const Loops *> levels_here = supported();
const Loops *loops = levels_here.empty() ? nullptr : levels_here[0];

template <typename T>
T *at(unsigned long long address) {
    return reinterpret_cast<T *>(address);
}

using Address = unsigned long long;

PyObject *levels(PyObject *, PyObject *) {
    PyObject *names = PyTuple_New(levels_here.size());
    for (size_t i = 0; names && i < levels_here.size(); i++)
        PyTuple_SetItem(names, i, PyUnicode_FromString(levels_here[i]->name));
    return names;
}

PyObject *use(PyObject *, PyObject *args) {
    const char *name;
    if (!PyArg_ParseTuple(args, "s", &name)) return nullptr;
    for (const Loops *some : levels_here)
        if (!strcmp(some->name, name)) {
            loops = some;
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "this processor has no %s", name);
}

struct Norm {  // batch norm's parameters and running statistics
    const float *weight, *bias;
    float *mean, *variance;
    double momentum, epsilon;
};

// Batch norm, pooling and ReLU. In training `best` and `saved`, (2, c), keep what gradients need; without `saved` it
// goes by the running statistics.
void normalize(const float *x, const Shape &s, const Norm &norm, float *out, float *best, double *saved) {
    const long pixels = s.n * s.h * s.w;
    std::vector<double> found(2 * s.c);
    Floats affine(2 * s.c);
    if (saved) {  // in training: of this batch, which the running ones follow
        loops->moments(x, pixels, s.c, &found[0], &found[s.c]);
        for (long k = 0; k < s.c; k++) {
            const double v = found[s.c + k] = found[s.c + k] < 0 ? 0 : found[s.c + k];
            norm.mean[k] += norm.momentum * (found[k] - norm.mean[k]);
            norm.variance[k] += norm.momentum * (v * pixels / (pixels - 1) - norm.variance[k]);
        }
    } else {
        std::copy_n(norm.mean, s.c, &found[0]);
        std::copy_n(norm.variance, s.c, &found[s.c]);
    }
    for (long k = 0; k < s.c; k++) {
        const double inverse = 1 / std::sqrt(found[s.c + k] + norm.epsilon);
        affine[k] = norm.weight[k] * inverse;
        affine[s.c + k] = norm.bias[k] - found[k] * affine[k];
        if (saved) saved[k] = found[k], saved[s.c + k] = inverse;
    }
    loops->norm_pool(x, s, &affine[0], &affine[s.c], out, best);
}

// Gradients of batch norm's parameters. Returns scale, base and slope for `spread`, (3, c).
Floats norm_gradients(const Shape &s, const float *weight, const double *saved, const float *out, const float *best,
                      const float *grad, float *to_weight, float *to_bias) {
    const double pixels = s.n * s.h * s.w, *mean = saved, *inverse = mean + s.c;
    std::vector<double> found(2 * s.c);
    Floats affine(3 * s.c);
    loops->passed(out, best, grad, s.n * (s.h / 2) * (s.w / 2), s.c, &found[0], &found[s.c]);
    for (long k = 0; k < s.c; k++) {
        const double scale = weight[k] * inverse[k];
        const double sum = found[k], dot = (found[s.c + k] - mean[k] * sum) * inverse[k];
        const double slope = -scale * inverse[k] * dot / pixels;
        to_weight[k] = dot, to_bias[k] = sum;
        affine[k] = scale, affine[s.c + k] = -scale * sum / pixels - slope * mean[k], affine[2 * s.c + k] = slope;
    }
    return affine;
}

PyObject *norm_forward(PyObject *, PyObject *args) {
    Address x, weight, bias, mean, variance, out, best, saved;
    Shape s;
    double momentum, epsilon;
    if (!PyArg_ParseTuple(args, "K(llll)KKKKddKKK", &x, &s.n, &s.h, &s.w, &s.c, &weight, &bias, &mean, &variance,
                          &momentum, &epsilon, &out, &best, &saved))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    const Norm norm = {at<float>(weight), at<float>(bias), at<float>(mean), at<float>(variance), momentum, epsilon};
    normalize(at<float>(x), s, norm, at<float>(out), at<float>(best), at<double>(saved));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *norm_backward(PyObject *, PyObject *args) {
    Address x, weight, saved, out, best, grad, to_x, to_weight, to_bias;
    Shape s;
    if (!PyArg_ParseTuple(args, "K(llll)KKKKKKKK", &x, &s.n, &s.h, &s.w, &s.c, &weight, &saved, &out, &best, &grad,
                          &to_x, &to_weight, &to_bias))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    const Floats affine = norm_gradients(s, at<float>(weight), at<double>(saved), at<float>(out), at<float>(best),
                                         at<float>(grad), at<float>(to_weight), at<float>(to_bias));
    loops->spread(at<float>(x), s, at<float>(out), at<float>(best), at<float>(grad), &affine[0], &affine[s.c],
                  &affine[2 * s.c], at<float>(to_x));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

// Call work(place in torch's weights, place in packed ones): the latter are (blocks of channels, kh, kw, the other
// channels, 16), and blocks are of output channels, or of input channels `by_input`.
template <typename Work>
void packing(const Conv &s, bool by_input, const Work &work) {
    const long kernel = s.kh * s.kw;
    for (long o = 0; o < s.out; o++)
        for (long c = 0; c < s.c; c++) {
            const long blocked = by_input ? c : o, other = by_input ? o : c, others = by_input ? s.out : s.c;
            long place = (blocked / BLOCK * kernel * others + other) * BLOCK + blocked % BLOCK;
            for (long tap = 0; tap < kernel; tap++, place += others * BLOCK) work(s.place(o, c, tap), place);
        }
}

// Weights as the loops take them: packed, and at their points where they go by tiles.
Floats prepared(const Conv &s, bool by_input, const float *weights) {
    Floats packed(s.weights());
    packing(s, by_input, [&](long here, long there) { packed[there] = weights[here]; });
    if (!s.by_tiles()) return packed;
    Floats points(s.at_points());
    loops->kernels_at_points(&packed[0], by_input ? s.c : s.out, by_input ? s.out : s.c, &points[0]);
    return points;
}

void convolve(const Conv &s, const float *x, const Floats &weights, const float *bias, float *y) {
    (s.by_tiles() ? loops->conv5 : loops->conv)(x, s, &weights[0], bias, y);
}

// Gradients of a convolution, added up over parts of the images.
class Gradients {
    const Conv s;
    const Floats weights;
    Floats sums;  // of the weights' gradients, as the loops make them

 public:
    Gradients(const Conv &s, const float *weight, bool to_x)
        : s(s),
          weights(to_x ? prepared(s, true, weight) : Floats()),
          sums(s.by_tiles() ? s.at_points() : s.weights()) {}

    void add(const Conv &part, const float *x, const float *dy, float *to_bias, float *to_x) {
        if (s.by_tiles()) return loops->conv5_back(x, part, weights.data(), dy, &sums[0], to_bias, to_x);
        loops->conv_weights(x, part, dy, &sums[0], to_bias);
        if (to_x) loops->conv_input(part, &weights[0], dy, to_x);
    }

    void write(float *to_weight) {
        Floats found(s.by_tiles() ? s.weights() : 0);
        if (s.by_tiles()) loops->kernels_back(&sums[0], s.out, s.c, &found[0]);
        const Floats &packed = s.by_tiles() ? found : sums;
        packing(s, false, [&](long here, long there) { to_weight[here] = packed[there]; });
    }
};

// Images that are convolved before they are pooled: so few that what comes between stays in the cache.
long at_a_time(const Conv &s) { return std::clamp(65536 / s.made(), 1L, 12L); }

// Call work(first, part) for so many images after the other.
template <typename Work>
void in_parts(const Conv &s, const Work &work) {
    for (long first = 0; first < s.n; first += at_a_time(s)) {
        Conv part = s;
        part.n = std::min(at_a_time(s), s.n - first);
        work(first, part);
    }
}

// Convolution, pooling and ReLU; `won`, which may be missing, keeps what gradients need.
void convolve_and_pool(const Conv &s, const float *x, const float *weight, const float *bias, float *out, int *won) {
    const Floats weights = prepared(s, false, weight);
    Floats y(at_a_time(s) * s.made());
    in_parts(s, [&](long first, const Conv &part) {
        convolve(part, x + first * s.image(), weights, bias, &y[0]);
        for (long n = 0; n < part.n; n++)
            loops->pool(&y[n * s.made()], s.rows(), s.columns(), s.out, out + (first + n) * s.pooled(),
                        won ? won + (first + n) * s.pooled() : nullptr);
    });
}

// Gradients of a convolution whose outputs' gradients `make(first, part, dy)` makes for a few images at a time; to_x
// may be missing.
template <typename Make>
void convolve_back(const Conv &s, const float *x, const float *weight, float *to_x, float *to_weight, float *to_bias,
                   const Make &make) {
    Gradients gradients(s, weight, to_x);
    Floats dy(at_a_time(s) * s.made());
    std::fill_n(to_bias, s.out, 0.0f);
    in_parts(s, [&](long first, const Conv &part) {
        make(first, part, &dy[0]);
        gradients.add(part, x + first * s.image(), &dy[0], to_bias, to_x ? to_x + first * s.image() : nullptr);
    });
    gradients.write(to_weight);
}

// The same of convolution, pooling and ReLU.
void convolve_and_pool_back(const Conv &s, const float *x, const float *weight, const int *won, const float *grad,
                            float *to_x, float *to_weight, float *to_bias) {
    convolve_back(s, x, weight, to_x, to_weight, to_bias, [&](long first, const Conv &part, float *dy) {
        for (long n = 0; n < part.n; n++)  // what no window covers stays 0
            loops->unpool(won + (first + n) * s.pooled(), grad + (first + n) * s.pooled(), s.rows(), s.columns(), s.out,
                          dy + n * s.made());
    });
}

PyObject *conv_forward(PyObject *, PyObject *args) {
    Address x, weight, bias, out;
    Conv s;
    if (!PyArg_ParseTuple(args, "K(lllllll)KKK", &x, &s.n, &s.h, &s.w, &s.c, &s.out, &s.kh, &s.kw, &weight, &bias,
                          &out))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    convolve(s, at<float>(x), prepared(s, false, at<float>(weight)), at<float>(bias), at<float>(out));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *conv_backward(PyObject *, PyObject *args) {
    Address x, weight, grad, to_x, to_weight, to_bias;
    Conv s;
    if (!PyArg_ParseTuple(args, "K(lllllll)KKKKK", &x, &s.n, &s.h, &s.w, &s.c, &s.out, &s.kh, &s.kw, &weight, &grad,
                          &to_x, &to_weight, &to_bias))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    Gradients gradients(s, at<float>(weight), to_x);
    std::fill_n(at<float>(to_bias), s.out, 0.0f);
    gradients.add(s, at<float>(x), at<float>(grad), at<float>(to_bias), at<float>(to_x));
    gradients.write(at<float>(to_weight));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *conv_pool_forward(PyObject *, PyObject *args) {
    Address x, weight, bias, out, won;
    Conv s;
    if (!PyArg_ParseTuple(args, "K(lllllll)KKKK", &x, &s.n, &s.h, &s.w, &s.c, &s.out, &s.kh, &s.kw, &weight, &bias,
                          &out, &won))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    convolve_and_pool(s, at<float>(x), at<float>(weight), at<float>(bias), at<float>(out), at<int>(won));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject *conv_pool_backward(PyObject *, PyObject *args) {
    Address x, weight, won, grad, to_x, to_weight, to_bias;
    Conv s;
    if (!PyArg_ParseTuple(args, "K(lllllll)KKKKKK", &x, &s.n, &s.h, &s.w, &s.c, &s.out, &s.kh, &s.kw, &weight, &won,
                          &grad, &to_x, &to_weight, &to_bias))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    convolve_and_pool_back(s, at<float>(x), at<float>(weight), at<int>(won), at<float>(grad), at<float>(to_x),
                           at<float>(to_weight), at<float>(to_bias));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

#include "network.inc"

PyMethodDef methods[] = {
    {"levels", levels, METH_NOARGS, "Return the instruction sets that this processor has loops for, the best first."},
    {"use", use, METH_VARARGS, "Take the loops for another of `levels()`."},
    {"norm_forward", norm_forward, METH_VARARGS, "Batch norm, 2x2 max-pooling and ReLU."},
    {"norm_backward", norm_backward, METH_VARARGS, "Gradients of norm_forward in training."},
    {"conv_forward", conv_forward, METH_VARARGS, "Convolution without padding."},
    {"conv_backward", conv_backward, METH_VARARGS, "Gradients of conv_forward."},
    {"conv_pool_forward", conv_pool_forward, METH_VARARGS, "Convolution without padding, 2x2 max-pooling and ReLU."},
    {"conv_pool_backward", conv_pool_backward, METH_VARARGS, "Gradients of conv_pool_forward."},
    {"network_room", network_room, METH_VARARGS, "Return how many floats a network's forward and backward need."},
    {"network_forward", network_forward, METH_VARARGS, "Outputs of a network in training."},
    {"network_backward", network_backward, METH_VARARGS, "Gradients of a network, after network_forward."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_compiled", "Compiled inner loops.", 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__compiled() { return PyModule_Create(&definition); }
