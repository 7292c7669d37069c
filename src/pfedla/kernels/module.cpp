// Batch norm, pooling and ReLU in one. `loops.inc` holds the loops, compiled for two instruction sets of x86-64; the
// best that the processor has is chosen when the module is loaded. Elsewhere `levels()` is empty.
//
// Functions take addresses and sizes and trust them: `pfedla.kernels` checks what it passes. Nothing is allocated for
// the caller, and the interpreter's lock is given up meanwhile.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr long RUN = 64;  // pixels that are summed up in single precision

struct Shape {
    long n, h, w, c;
};

struct Loops {  // one instruction set's
    const char *name;
    void (*moments)(const float *, long, long, double *, double *);
    void (*norm_pool)(const float *, Shape, const float *, const float *, float *, float *);
    void (*passed)(const float *, const float *, const float *, long, long, double *, double *);
    void (*spread)(const float *, Shape, const float *, const float *, const float *, const float *, const float *,
                   const float *, float *);
};

#define LOOPS(name) {#name, moments, norm_pool, passed, spread}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
namespace avx2 {
constexpr int LANES = 8;
#include "loops.inc"
constexpr Loops all = LOOPS(avx2);
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi2,prefer-vector-width=512")
namespace avx512 {
constexpr int LANES = 16;
#include "loops.inc"
constexpr Loops all = LOOPS(avx512);
}  // namespace avx512
#pragma GCC pop_options

std::vector<const Loops *> supported() {  // the best first
    std::vector<const Loops *> found;
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")))
        return found;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
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

PyObject *norm_forward(PyObject *, PyObject *args) {
    Address x, weight, bias, mean, variance, out, best, saved;
    Shape s;
    double momentum, epsilon;
    if (!PyArg_ParseTuple(args, "K(llll)KKKKddKKK", &x, &s.n, &s.h, &s.w, &s.c, &weight, &bias, &mean, &variance,
                          &momentum, &epsilon, &out, &best, &saved))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    const long pixels = s.n * s.h * s.w;
    std::vector<double> found(2 * s.c);
    std::vector<float> affine(2 * s.c);
    float *running_mean = at<float>(mean), *running_variance = at<float>(variance);
    if (saved) {  // in training: of this batch, which the running ones follow
        loops->moments(at<float>(x), pixels, s.c, &found[0], &found[s.c]);
        for (long k = 0; k < s.c; k++) {
            const double v = found[s.c + k] = found[s.c + k] < 0 ? 0 : found[s.c + k];
            running_mean[k] += momentum * (found[k] - running_mean[k]);
            running_variance[k] += momentum * (v * pixels / (pixels - 1) - running_variance[k]);
        }
    } else {
        std::copy_n(running_mean, s.c, &found[0]);
        std::copy_n(running_variance, s.c, &found[s.c]);
    }
    for (long k = 0; k < s.c; k++) {
        const double inverse = 1 / std::sqrt(found[s.c + k] + epsilon);
        affine[k] = at<float>(weight)[k] * inverse;
        affine[s.c + k] = at<float>(bias)[k] - found[k] * affine[k];
        if (saved) at<double>(saved)[k] = found[k], at<double>(saved)[s.c + k] = inverse;
    }
    loops->norm_pool(at<float>(x), s, &affine[0], &affine[s.c], at<float>(out), at<float>(best));
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
    const double pixels = s.n * s.h * s.w, *mean = at<double>(saved), *inverse = mean + s.c;
    std::vector<double> found(2 * s.c);
    std::vector<float> affine(3 * s.c);
    loops->passed(at<float>(out), at<float>(best), at<float>(grad), s.n * (s.h / 2) * (s.w / 2), s.c, &found[0],
                  &found[s.c]);
    for (long k = 0; k < s.c; k++) {
        const double scale = at<float>(weight)[k] * inverse[k];
        const double sum = found[k], dot = (found[s.c + k] - mean[k] * sum) * inverse[k];
        const double slope = -scale * inverse[k] * dot / pixels;
        at<float>(to_weight)[k] = dot, at<float>(to_bias)[k] = sum;
        affine[k] = scale, affine[s.c + k] = -scale * sum / pixels - slope * mean[k], affine[2 * s.c + k] = slope;
    }
    loops->spread(at<float>(x), s, at<float>(out), at<float>(best), at<float>(grad), &affine[0], &affine[s.c],
                  &affine[2 * s.c], at<float>(to_x));
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"levels", levels, METH_NOARGS, "Return the instruction sets that this processor has loops for, the best first."},
    {"use", use, METH_VARARGS, "Take the loops for another of `levels()`."},
    {"norm_forward", norm_forward, METH_VARARGS, "Batch norm, 2x2 max-pooling and ReLU."},
    {"norm_backward", norm_backward, METH_VARARGS, "Gradients of norm_forward in training."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_compiled", "Compiled inner loops.", 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__compiled() { return PyModule_Create(&definition); }
