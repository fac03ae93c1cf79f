// A table that is too wide for the page gets smaller letters. Where that does not help on a narrow page, or names in it
// are broken, it becomes a list: a block for every row, a line for every cell. On a wide page its words
// and numbers may break then (torn).
const NUMBERS = /^[\d\s.,+\-−±×*%()<e]+$/;

function fit() {
    for (const table of document.querySelectorAll("article .table-wrapper > table")) {
        const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
        for (const row of table.querySelectorAll("tbody tr")) {
            [...row.cells].forEach((cell, place) => {
                cell.dataset.head = heads[place] || "";
                cell.classList.toggle("blank", !cell.textContent.trim());
                cell.classList.toggle("number", NUMBERS.test(cell.textContent));
            });
        }
        const wide = () => table.parentElement.scrollWidth > table.parentElement.clientWidth;
        const broken = () => [...table.querySelectorAll("code")].some((name) => name.getClientRects().length > 1);
        table.classList.remove("small", "torn", "listed");
        if (matchMedia("(max-width: 46em)").matches) {
            if (wide()) table.classList.add("small");
            if (wide() || broken()) table.classList.add("listed");
        } else {
            for (const way of ["small", "torn"]) if (wide()) table.classList.add(way);
        }
    }
}

addEventListener("load", fit);
addEventListener("resize", fit);

// A figure leads to its file, where it can be enlarged. On a narrow page one with small letters is scrolled sideways.
const LETTERS_ARE_SMALL = 1000; // pixels that the file of such a figure is wide

function enlarge() {
    for (const image of document.querySelectorAll('article img[src$=".png"]')) {
        if (image.closest("a")) continue;
        const link = document.createElement("a");
        link.href = image.src;
        link.className = image.naturalWidth > LETTERS_ARE_SMALL ? "figure wide" : "figure";
        image.replaceWith(link);
        link.append(image);
    }
}

addEventListener("load", enlarge);
